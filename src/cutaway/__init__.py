"""cutaway: one readable transformer you can run, train, serve and see through."""
