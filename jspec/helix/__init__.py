"""Helix parallelism: attention over KVP x TPA devices, the feed-forward over the same ones.

Bhatia et al. 2025 (arXiv 2507.07120). So far its simulator: `jspec.helix.simulator`.
"""
