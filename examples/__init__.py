"""Short programs that show how to use the parts; see examples/README.md."""
