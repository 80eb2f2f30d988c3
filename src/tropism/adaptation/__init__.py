"""Policies that decide where LoRA trains, what rewards weigh and how much is sampled."""
