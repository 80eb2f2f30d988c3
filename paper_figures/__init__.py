"""The figures of the paper and of the README, each redrawn from a CSV."""
