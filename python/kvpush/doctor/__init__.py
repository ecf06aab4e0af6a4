"""The doctor: what this machine has, and a short real transfer over each transport."""
