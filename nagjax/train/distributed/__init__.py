"""Several devices and hosts as one run: the mesh, the hosts, and how hosts reach the same decision."""
