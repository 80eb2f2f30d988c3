"""Callbacks: the only code that hooks the Trainer, one callback per file."""
