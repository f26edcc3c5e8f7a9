"""The example of Ray Serve, on a real cluster, over HTTP."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from greensched import LaunchConfig, Pool
from greensched.driver import simulated
from greensched.kernels import fill, latch, reduce_sum

ray = pytest.importorskip("ray", reason="ray is not installed: make test-integrations")
serve = pytest.importorskip("ray.serve", reason="ray[serve] is not installed")
