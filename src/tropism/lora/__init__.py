"""LoRA: injection, placement and export."""
