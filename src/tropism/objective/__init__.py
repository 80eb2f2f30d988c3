"""What is optimised: pure functions, tensors in and tensors out."""
