"""In which order autograd's engine takes nodes that are ready to run."""

from __future__ import annotations

from typing import Any

Item = tuple[int, Any]


class ReadyQueue:
    """The engine's queue of one thread: the node with the highest sequence number first.

    It is a C++ `std::priority_queue`. In which order that gives out equal elements (several leaves of one operator) follows from how libstdc++
    keeps its heap, which this class does in the same way.
    """

    def __init__(self) -> None:
        self._heap: list[Item] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: Any) -> None:
        self._heap.append((node._sequence_nr(), node))
        self._sift_up(self._heap[-1], len(self._heap) - 1)

    def pop(self) -> Any:
        heap = self._heap
        first, last = heap[0], heap.pop()
        if not heap:
            return first[1]
        hole, child = 0, 2
        while child < len(heap):
            if heap[child][0] < heap[child - 1][0]:
                child -= 1
            heap[hole], hole = heap[child], child
            child = 2 * child + 2
        if child == len(heap):
            heap[hole], hole = heap[child - 1], child - 1
        self._sift_up(last, hole)
        return first[1]

    def _sift_up(self, item: Item, hole: int) -> None:
        heap = self._heap
        while hole and heap[(hole - 1) // 2][0] < item[0]:
            heap[hole] = heap[(hole - 1) // 2]
            hole = (hole - 1) // 2
        heap[hole] = item
