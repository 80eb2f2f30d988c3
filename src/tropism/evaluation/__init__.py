"""Scores with intervals."""
