"""Adapter for Google's Gemini models."""
