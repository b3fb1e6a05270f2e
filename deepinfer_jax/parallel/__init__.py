"""Several devices: the mesh, and where every array of the model lies on it."""
