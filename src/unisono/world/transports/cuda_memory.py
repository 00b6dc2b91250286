"""Memory of a CUDA device that several processes map (CUDA IPC), by the driver's own functions."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["HANDLE_BYTES", "CudaMemory", "Memory", "NotShareable", "Segment"]

HANDLE_BYTES = 64
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_LEAST = 2 << 20  # bytes of an allocation of my own


class NotShareable(RuntimeError):
    """Memory that other processes cannot map, or mapping that this system does not allow."""


class Segment(NamedTuple):
    """What was allocated in one piece: others map all of it."""

    number: int  # of this allocation alone, in its process
    address: int
    nbytes: int
    handle: bytes


class Memory(Protocol):
    """What ranks that see each other's memory ask of it; that of a device is filled while the host goes on."""

    device: torch.device

    def settle(self) -> None:
        """Wait until what this thread has asked for has been done."""

    def find(self, x: Tensor, known: Mapping[int, Segment]) -> Segment:
        """The allocation that `x` lies in, one of `known` (by number) or another; NotShareable if others cannot map
        it."""

    def is_there(self, segment: Segment) -> bool:
        """Whether the allocation still exists."""

    def allocate(self, nbytes: int) -> Tensor:
        """Memory of my own that others can map."""

    def map(self, handle: bytes, nbytes: int) -> Tensor:
        """An allocation of another process, as bytes; NotShareable if that does not work."""

    def unmap(self, line: Tensor) -> None:
        """Give back what `map` gave."""


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char * HANDLE_BYTES),)


class _Bytes:
    """Device memory as torch takes it: a tensor keeps this object, and with it what is to be freed last."""

    def __init__(self, address: int, nbytes: int, owner: object = None) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}
        self.owner = owner


class _Allocation:
    """Memory from the driver; freed with the last tensor that lies in it."""

    def __init__(self, memory: CudaMemory, nbytes: int) -> None:
        self._memory = memory
        with memory.context():
            self.address = memory.ask("cuMemAlloc_v2", ctypes.c_uint64(), ctypes.c_size_t(nbytes))

    def __del__(self) -> None:
        if hasattr(self, "address") and not sys.is_finalizing():
            with self._memory.context():
                self._memory.driver.cuMemFree_v2(ctypes.c_uint64(self.address))


class CudaMemory:
    """The memory of one device. Its allocator's segments are mapped whole, so tensors need no memory of a kind of their
    own; expandable segments cannot be mapped."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        try:
            self.driver: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NotShareable(f"the driver's library cannot be loaded: {error}") from error
        number = self.ask("cuDeviceGet", ctypes.c_int(), ctypes.c_int(self.device.index))
        self._context = ctypes.c_void_p(self.ask("cuDevicePrimaryCtxRetain", ctypes.c_void_p(), ctypes.c_int(number)))

    def settle(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def find(self, x: Tensor, known: Mapping[int, Segment]) -> Segment:
        with self.context():
            at = ctypes.c_uint64(x.data_ptr())
            number = self.ask("cuPointerGetAttribute", ctypes.c_uint64(), ctypes.c_int(_BUFFER_ID), at)
            if number in known:
                return known[number]
            nbytes = ctypes.c_size_t()
            address = self.ask("cuMemGetAddressRange_v2", ctypes.c_uint64(), ctypes.byref(nbytes), at)
            handle, start = _Handle(), ctypes.c_uint64(address)
            self._check("cuIpcGetMemHandle", self.driver.cuIpcGetMemHandle(ctypes.byref(handle), start))
        return Segment(number, address, nbytes.value, bytes(handle))

    def is_there(self, segment: Segment) -> bool:
        found = ctypes.c_uint64()
        with self.context():
            at = ctypes.c_uint64(segment.address)
            error = self.driver.cuPointerGetAttribute(ctypes.byref(found), ctypes.c_int(_BUFFER_ID), at)
        return not error and found.value == segment.number

    def allocate(self, nbytes: int) -> Tensor:
        nbytes = max(_LEAST, 1 << (nbytes - 1).bit_length())
        try:
            allocation = _Allocation(self, nbytes)
        except NotShareable:  # torch may keep so much that is free
            torch.cuda.empty_cache()
            allocation = _Allocation(self, nbytes)
        return torch.as_tensor(_Bytes(allocation.address, nbytes, allocation), device=self.device)

    def map(self, handle: bytes, nbytes: int) -> Tensor:
        wanted = _Handle.from_buffer_copy(handle)
        with self.context():
            flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
            address = self.ask("cuIpcOpenMemHandle_v2", ctypes.c_uint64(), wanted, flags)
        return torch.as_tensor(_Bytes(address, nbytes), device=self.device)

    def unmap(self, line: Tensor) -> None:
        with self.context():
            self.driver.cuIpcCloseMemHandle(ctypes.c_uint64(line.data_ptr()))

    @contextmanager
    def context(self) -> Iterator[None]:
        """The device's context in this thread."""
        self._check("cuCtxPushCurrent", self.driver.cuCtxPushCurrent_v2(self._context))
        try:
            yield
        finally:
            self.driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def ask(self, name: str, found: Any, *arguments: Any) -> int:
        """The number that a function of the driver writes to where its first argument points."""
        self._check(name, getattr(self.driver, name)(ctypes.byref(found), *arguments))
        return int(found.value or 0)

    def _check(self, name: str, error: int) -> None:
        if error:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(ctypes.c_int(error), ctypes.byref(text))
            why = (text.value or b"unknown error").decode("ascii", "replace")
            raise NotShareable(f"{name.removesuffix('_v2')}: {why} ({error})")
