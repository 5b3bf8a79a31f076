"""The shipped codecs against the shipped suites."""

from __future__ import annotations

from tierkv.testing.codecs import BytesCodecTests, TensorBytesCodecTests
from tierkv_codecs.int8 import Int8
from tierkv_codecs.lz4 import Lz4
from tierkv_codecs.raw import Raw
from tierkv_codecs.zstd import Zstd


class TestRaw(TensorBytesCodecTests):
    def make(self) -> Raw:
        return Raw()


class TestInt8(TensorBytesCodecTests):
    def make(self) -> Int8:
        return Int8()


class TestZstd(BytesCodecTests):
    def make(self) -> Zstd:
        return Zstd()


class TestLz4(BytesCodecTests):
    def make(self) -> Lz4:
        return Lz4()
