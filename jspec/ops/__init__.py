"""Operations: one file each with its signature, checks, jnp reference and choice of backend."""
