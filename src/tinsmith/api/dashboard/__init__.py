"""The dashboard: its static files and the JSON that its pages read."""
