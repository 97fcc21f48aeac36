"""Attacks on a live server: processes that die at random, broken requests by the thousand, a flood of the queue."""
