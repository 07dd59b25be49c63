"""The ring in JAX: block.py, what a device computes between two hops; ring.py, the ring. It needs the extra [jax]."""
