"""The workshop: write the ring yourself, in six steps, each examined by the doctor."""
