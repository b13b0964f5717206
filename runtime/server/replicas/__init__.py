"""Several engines behind one address: Ray Serve keeps the replicas and chooses among them."""
