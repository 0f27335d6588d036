"""Render runs, events and results for people and for programs."""
