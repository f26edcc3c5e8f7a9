"""Tests of greensched.kernels. None needs a GPU; test_compile needs NVRTC."""
