"""Prints the folder of cuda.h of the runtime package that the nvrtc extra brings."""

from pathlib import Path

from cuda.pathfinder import find_nvidia_header_directory

folder = find_nvidia_header_directory("cudart")
if folder is not None and (Path(folder) / "cuda.h").exists():
    print(folder)
