"""Print the folder of the cuda.h that the nvrtc extra installs."""

from pathlib import Path

from cuda.pathfinder import find_nvidia_header_directory

folder = find_nvidia_header_directory("cudart")
if folder is not None and (Path(folder) / "cuda.h").exists():
    print(folder)
