"""Processes die at named points, or at any moment: training runs of the real SDK end with the same results."""
