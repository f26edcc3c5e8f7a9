"""Prints the folder of cuda.h from the runtime package, unless the system has a toolkit."""

import shutil
from pathlib import Path

if shutil.which("nvcc") is None:
    from cuda.pathfinder import find_nvidia_header_directory

    folder = find_nvidia_header_directory("cudart")
    if folder is not None and (Path(folder) / "cuda.h").exists():
        print(folder)
