"""A small rasterizer of the table scene in numpy, for machines without a GL: same frames in kind,
seen from straight above, with flat shading and hard edges. It draws what `mujoco.MjData` says."""

from __future__ import annotations

from typing import Any

import numpy as np

#: Metres that the frame covers, and the middle of it.
SPAN, MIDDLE = 0.95, (0.0, 0.22)


class Raster:
    """Renders capsules, boxes and flat cylinders seen from above; `mujoco.Renderer`'s interface."""

    def __init__(self, model: Any, size: int) -> None:
        self.model, self.size = model, size
        axis = (np.arange(size) + 0.5) / size - 0.5
        self.x = (MIDDLE[0] + SPAN * axis)[None, :].astype(np.float32)
        self.y = (MIDDLE[1] - SPAN * axis)[:, None].astype(np.float32)
        self.data: Any = None

    def update_scene(self, data: Any, camera: Any = None) -> None:
        """Take the state to draw; there is one camera."""
        self.data = data

    def render(self) -> np.ndarray:
        """The frame, (size, size, 3) uint8."""
        model, data = self.model, self.data
        ground = model.geom_rgba[0, :3]
        frame = np.empty((self.size, self.size, 3), np.float32)
        frame[:] = ground
        for k in range(model.nsite):
            if model.site_size[k, 0] > 0.01:
                self._mark(frame, data.site_xpos[k], model.site_size[k, 0], model.site_rgba[k])
        for k in range(1, model.ngeom):
            at, rot = data.geom_xpos[k], data.geom_xmat[k].reshape(3, 3)
            inside = self._inside(model.geom_type[k], model.geom_size[k], at, rot)
            frame[inside] = model.geom_rgba[k, :3]
        return (255 * frame).astype(np.uint8)

    def _mark(self, frame: np.ndarray, at: Any, radius: float, rgba: Any) -> None:
        inside = (self.x - at[0]) ** 2 + (self.y - at[1]) ** 2 < radius**2
        frame[inside] = (1 - rgba[3]) * frame[inside] + rgba[3] * rgba[:3]

    def _inside(self, kind: int, size: Any, at: Any, rot: np.ndarray) -> np.ndarray:
        dx, dy = self.x - at[0], self.y - at[1]
        if kind == 6:  # mjGEOM_BOX
            u, v = dx * rot[0, 0] + dy * rot[1, 0], dx * rot[0, 1] + dy * rot[1, 1]
            return (np.abs(u) < size[0]) & (np.abs(v) < size[1])
        along = np.clip(dx * rot[0, 2] + dy * rot[1, 2], -size[1], size[1])  # a capsule's axis is z
        return (dx - along * rot[0, 2]) ** 2 + (dy - along * rot[1, 2]) ** 2 < size[0] ** 2
