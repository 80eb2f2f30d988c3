"""What the closed loop does around a step: probe, observe, switch under watch, go back."""
