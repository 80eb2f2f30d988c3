"""What is measured while training, and the tables it is written to."""
