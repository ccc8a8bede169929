"""Drafting, the speculative step, and generation."""
