"""The second wave of codecs against the shipped suites."""

from __future__ import annotations

from tierkv.testing.codecs import BytesCodecTests, TensorBytesCodecTests
from tierkv_codecs.fp8 import Fp8
from tierkv_codecs.grouped import Int2, Int3, Int4, Int6
from tierkv_codecs.planes import Planes
from tierkv_codecs.rot import Rot2, Rot3, Rot4


class TestPlanes(BytesCodecTests):
    def make(self) -> Planes:
        return Planes()


class TestInt6(TensorBytesCodecTests):
    def make(self) -> Int6:
        return Int6()


class TestInt4(TensorBytesCodecTests):
    def make(self) -> Int4:
        return Int4()


class TestInt3(TensorBytesCodecTests):
    def make(self) -> Int3:
        return Int3()


class TestInt2(TensorBytesCodecTests):
    def make(self) -> Int2:
        return Int2()


class TestFp8(TensorBytesCodecTests):
    def make(self) -> Fp8:
        return Fp8()


class TestRot4(TensorBytesCodecTests):
    def make(self) -> Rot4:
        return Rot4()


class TestRot3(TensorBytesCodecTests):
    def make(self) -> Rot3:
        return Rot3()


class TestRot2(TensorBytesCodecTests):
    def make(self) -> Rot2:
        return Rot2()
