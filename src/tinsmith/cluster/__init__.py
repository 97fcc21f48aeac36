"""Engines and samplers as a fleet: which there are, who keeps them running, and which work is whose."""
