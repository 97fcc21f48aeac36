"""Processes die at named points, or at any moment: training runs by the real SDK end as if nothing had happened."""
