"""Measurements: ratios side by side in one run, as a table or as JSON."""
