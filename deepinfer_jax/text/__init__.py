"""Text side of the package: token ids in, token ids out, nothing on the device."""
