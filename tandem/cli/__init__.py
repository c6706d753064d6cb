"""The console script `tandem`: runs the services on one machine and talks to them."""
