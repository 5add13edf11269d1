"""Several devices and several hosts as one: the mesh, the hosts, and how they come to one decision."""
