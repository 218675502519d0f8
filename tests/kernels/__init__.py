"""Tests of kvbridge.kernels, mirroring kernels/."""
