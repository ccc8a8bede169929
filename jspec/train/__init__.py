"""Learning the hashes of HATA from a model's own queries and keys (Gong et al., ACL 2025)."""
