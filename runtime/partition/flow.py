"""The cheapest set of vertices that separates sources from sinks: Dinic's maximum flow on arrays.

Vertices have capacities, edges have none. The graph falls into components before it is solved (a value that is kept anyway, or that is
free, is not in it), and vertices in series become one, so what is left to solve is small: time grows nearly linearly with the graph.
Source: E. A. Dinic, Soviet Math. Doklady 11 (1970); the vertices are split as is usual for vertex cuts.
"""

from __future__ import annotations

from collections.abc import Sequence

INFINITE = 1 << 60  # more than any number of bytes
#: More than all vertices together, so that a cut never runs through an edge.
_EDGE = 1 << 100


def min_vertex_cut(
    inputs: Sequence[Sequence[int]], capacity: Sequence[int], source: Sequence[bool], sink: Sequence[bool]
) -> list[int]:
    """Vertices of least total capacity that meet every path from a source to a sink (both may be cut themselves).

    Vertices are numbered so that `inputs[v]` are smaller than `v`. Of several cheapest cuts, the one nearest to the sinks is taken.
    Returns their numbers in order; a vertex of capacity `INFINITE` in it means that there is no finite cut.
    """
    group = _components(inputs)
    members: dict[int, list[int]] = {}
    for v, g in enumerate(group):
        members.setdefault(g, []).append(v)
    cut = []
    for vertices in members.values():
        if len(vertices) == 1:
            v = vertices[0]
            if source[v] and sink[v]:
                cut.append(v)
            continue
        cut += _solve(vertices, inputs, capacity, source, sink)
    return sorted(cut)


def _components(inputs: Sequence[Sequence[int]]) -> list[int]:
    """For each vertex, the number of its component's first vertex."""
    parent = list(range(len(inputs)))

    def find(v: int) -> int:
        while parent[v] != v:
            parent[v] = parent[parent[v]]
            v = parent[v]
        return v

    for v, operands in enumerate(inputs):
        for u in operands:
            a, b = find(u), find(v)
            if a != b:
                parent[max(a, b)] = min(a, b)
    return [find(v) for v in range(len(inputs))]


def _solve(
    vertices: list[int],
    inputs: Sequence[Sequence[int]],
    capacity: Sequence[int],
    source: Sequence[bool],
    sink: Sequence[bool],
) -> list[int]:
    """One component. Node 2k is where vertex k is entered, 2k + 1 where it is left; the last two are source and sink."""
    local = {v: k for k, v in enumerate(vertices)}
    start, end = 2 * len(vertices), 2 * len(vertices) + 1
    net = _Network(end + 1)
    for k, v in enumerate(vertices):
        net.edge(2 * k, 2 * k + 1, capacity[v])
        for u in inputs[v]:
            net.edge(2 * local[u] + 1, 2 * k, _EDGE)
        if source[v]:
            net.edge(start, 2 * k, _EDGE)
        if sink[v]:
            net.edge(2 * k + 1, end, _EDGE)
    net.run(start, end)
    near = net.reaching(end)
    return [v for k, v in enumerate(vertices) if near[2 * k + 1] and not near[2 * k]]


class _Network:
    """Edges `e` and their reverses `e ^ 1`, by adjacency lists of edge numbers."""

    def __init__(self, size: int) -> None:
        self.edges: list[list[int]] = [[] for _ in range(size)]
        self.to: list[int] = []
        self.left: list[int] = []

    def edge(self, a: int, b: int, capacity: int) -> None:
        self.edges[a].append(len(self.to))
        self.edges[b].append(len(self.to) + 1)
        self.to += (b, a)
        self.left += (capacity, 0)

    def run(self, start: int, end: int) -> None:
        """Send as much as fits from `start` to `end`."""
        while True:
            depth = self.depths(start, end)
            if depth[end] < 0:
                return
            self.blocking_flow(start, end, depth)

    def depths(self, start: int, end: int) -> list[int]:
        """Fewest edges with room from `start` to each node, as far as `end` is; -1 where there is no way."""
        depth = [-1] * len(self.edges)
        depth[start] = 0
        row = [start]
        to, left = self.to, self.left
        while row and depth[end] < 0:
            following = []
            for a in row:
                d = depth[a] + 1
                for e in self.edges[a]:
                    if left[e] and depth[to[e]] < 0:
                        depth[to[e]] = d
                        following.append(to[e])
            row = following
        return depth

    def blocking_flow(self, start: int, end: int, depth: list[int]) -> None:
        """Fill the level graph: walk forward along edges with room, step back from dead ends, send when the end is reached."""
        to, left, edges = self.to, self.left, self.edges
        at = [0] * len(edges)
        path: list[int] = []
        a = start
        while True:
            if a == end:
                room = min(left[e] for e in path)
                first = len(path)
                for k, e in enumerate(path):
                    left[e] -= room
                    left[e ^ 1] += room
                    if not left[e] and k < first:
                        first = k
                a = to[path[first] ^ 1]
                del path[first:]
                continue
            mine = edges[a]
            i, want = at[a], depth[a] + 1
            while i < len(mine) and not (left[mine[i]] and depth[to[mine[i]]] == want):
                i += 1
            at[a] = i
            if i < len(mine):
                path.append(mine[i])
                a = to[mine[i]]
            elif a == start:
                return
            else:
                depth[a] = -1
                a = to[path.pop() ^ 1]

    def reaching(self, end: int) -> list[bool]:
        """The nodes from which `end` can still be reached."""
        near = [False] * len(self.edges)
        near[end] = True
        stack = [end]
        while stack:
            b = stack.pop()
            for e in self.edges[b]:
                a = self.to[e]
                if self.left[e ^ 1] and not near[a]:
                    near[a] = True
                    stack.append(a)
        return near
