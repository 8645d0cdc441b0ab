"""Tensors on a GPU without one: a puppet of the CUDA driver, arrays that only say where they are, and a puppet of torch whose
tensors say that they are on a device. What a real driver does is not tested here."""
import sys
import types
import unittest
from unittest import mock

import moed
import numpy as np
from moed import _cuda, _encoding, _messages
from moed._call import make_call
from support import Golden, ServerCase

BASE, SIZE = 0x7F0000000000, 1 << 30  # of the puppet's one allocation


class Library:
    """libcuda of one allocation and one context. `fails`: the function that returns an error."""

    def __init__(self, fails=""):
        self.fails, self.calls, self.pushed = fails, [], 0

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def function(*arguments):
            self.calls.append(name)
            if name == self.fails:
                return 201
            getattr(self, f"do_{name}", lambda *_: None)(*arguments)
            return 0
        return function

    def do_cuPointerGetAttribute(self, value, attribute, pointer):
        assert attribute == 1 and BASE <= pointer.value < BASE + SIZE
        value._obj.value = 0xC0DE

    def do_cuCtxPushCurrent_v2(self, context):
        assert context.value == 0xC0DE
        self.pushed += 1

    def do_cuCtxPopCurrent_v2(self, context):
        self.pushed -= 1

    def do_cuStreamSynchronize(self, stream):
        self.stream = stream.value

    def do_cuMemGetAddressRange_v2(self, base, size, pointer):
        base._obj.value, size._obj.value = BASE, SIZE

    def do_cuIpcGetMemHandle(self, handle, base):
        assert base.value == BASE and self.pushed == 1
        handle._obj[:] = bytes(range(64))

    def do_cuGetErrorName(self, code, name):
        name._obj.value = b"CUDA_ERROR_INVALID_CONTEXT"


class OnDevice:
    def __init__(self, offset=0, shape=(2, 64), typestr="<f4", **more):
        self.__cuda_array_interface__ = {"shape": shape, "typestr": typestr, "data": (BASE + offset, False), "version": 3, **more}


def request_of(library=None, hidden=None, ids=None, weights=None, **more):
    """The ForwardRequest of a call whose tensors are named by the puppet."""
    arguments = dict(logits=None, model="", dtype=None, output_dtype=None, out=None, routed_only=False, return_routing=False,
                     request_id="", cuda=_cuda.Driver(library or Library()))
    call = make_call(3, OnDevice(256) if hidden is None else hidden, ids, weights, **{**arguments, **more})
    return _messages.ForwardRequest.FromString(_encoding.encode_request(call)), call


class Handles(unittest.TestCase):
    def test_hidden_states_and_output_are_named_by_handle_and_offset_and_not_sent(self):
        out = OnDevice(4096, typestr="<f2")
        request, call = request_of(hidden=OnDevice(256), out=out)
        self.assertEqual((list(request.hidden.shape), request.hidden.dtype, request.hidden.data), ([2, 64], 1, b""))
        self.assertEqual(request.hidden.device_memory.cuda_ipc_handle, bytes(range(64)))
        self.assertEqual((request.hidden.device_memory.offset, request.output_memory.offset, request.output_dtype), (256, 4096, 3))
        answer = _messages.ForwardResponse(backend="b")
        answer.output.dtype = 3
        answer.output.shape.extend([2, 64])
        call.check_answer(answer.output, 0)
        call.fill(memoryview(b""))
        self.assertIs(call.result_of_message(answer, "rpc").output, out)
        with self.assertRaisesRegex(moed.Internal, "0 bytes"):
            call.check_answer(answer.output, 256)

    def test_either_of_them_may_be_on_the_host(self):
        request, call = request_of(hidden=OnDevice(256))
        self.assertEqual((request.HasField("output_memory"), call.output.shape, call.on_device), (False, (2, 64), True))
        request, call = request_of(hidden=np.ones((2, 64), np.float32), out=OnDevice(16))
        self.assertEqual((len(request.hidden.data), request.output_memory.offset), (512, 16))
        request, call = request_of(hidden=np.ones((2, 64), np.float32))
        self.assertFalse(call.on_device)

    def test_the_stream_that_an_array_tells_is_waited_for(self):
        for more, calls in (({}, 0), ({"stream": None}, 0), ({"stream": 2}, 1)):
            library = Library()
            request_of(library, OnDevice(0, **more))
            self.assertEqual(library.calls.count("cuStreamSynchronize"), calls)
        self.assertEqual(library.stream, 2)

    def test_dtypes_are_those_of_the_wire_and_uint16_is_bf16_when_it_is_said(self):
        self.assertEqual(request_of(hidden=OnDevice(typestr="<f2"))[0].hidden.dtype, 3)
        self.assertEqual(request_of(hidden=OnDevice(typestr="<u2"), dtype="bf16")[0].hidden.dtype, 2)
        for hidden, more in ((OnDevice(typestr="<u2"), {}), (OnDevice(), {"dtype": "bf16"}), (OnDevice(typestr="<f8"), {})):
            with self.assertRaisesRegex(moed.InvalidArgument, "hidden: wanted"):
                request_of(hidden=hidden, **more)

    def test_what_cannot_be_named_is_refused_by_name(self):
        ids, weights = np.zeros((2, 3), np.int32), np.zeros((2, 3), np.float32)
        for arguments, text in (({"hidden": OnDevice(shape=(2, 3, 4))}, r"hidden: .*\[2, 3, 4\]"),
                                ({"hidden": OnDevice(strides=(512, 4))}, "hidden: .*strided"),
                                ({"hidden": OnDevice(offset=8)}, "hidden: wanted one that starts at a multiple of 16"),
                                ({"out": OnDevice(offset=8)}, "out: wanted one that starts at a multiple of 16"),
                                ({"out": OnDevice(shape=(2, 63))}, r"out: wanted f32 of shape \[2, 64\]"),
                                ({"out": OnDevice(), "output_dtype": "bf16"}, "out: wanted bf16"),
                                ({"per_slot": True, "ids": ids, "weights": weights}, "per_slot: wanted tensors of the host")):
            with self.assertRaisesRegex(moed.InvalidArgument, text):
                request_of(**arguments)
        request_of(hidden=OnDevice(strides=(256, 4)))  # strides of a contiguous one

    def test_no_rows_need_no_memory(self):
        library = Library()
        request, call = request_of(library, OnDevice(shape=(0, 64)), out=OnDevice(shape=(0, 64)))
        self.assertEqual((list(request.hidden.shape), call.on_device, library.calls), ([0, 64], False, ["cuInit"]))

    def test_an_error_of_the_driver_is_told_by_name_and_leaves_no_context_behind(self):
        for function in ("cuPointerGetAttribute", "cuMemGetAddressRange_v2", "cuIpcGetMemHandle"):
            library = Library(function)
            with self.assertRaisesRegex(moed.Internal, rf"{function}: CUDA_ERROR_INVALID_CONTEXT \(201\)"):
                request_of(library)
            self.assertEqual(library.pushed, 0)
        with self.assertRaisesRegex(moed.Internal, "cuInit"):
            _cuda.Driver(Library("cuInit"))


class Options(unittest.TestCase):
    def test_ipc_is_refused_where_it_cannot_be(self):
        for options, kind, text in (({"cuda": "frob"}, moed.InvalidArgument, "cuda: wanted copy or ipc"),
                                    ({"cuda": "ipc", "transport": "ring"}, moed.InvalidArgument, "goes by messages")):
            with self.assertRaisesRegex(kind, text):
                moed.Client("localhost:1", **options)
        _cuda.driver.cache_clear()
        self.addCleanup(_cuda.driver.cache_clear)
        with mock.patch("ctypes.CDLL", side_effect=OSError("libcuda.so.1: no such file")):
            with self.assertRaisesRegex(moed.Unimplemented, "wanted the CUDA driver and a GPU, got libcuda"):
                moed.Client("localhost:1", cuda="ipc")


class Tensor:
    """Of the puppet of torch."""
    made = 0

    def __init__(self, array, device="cpu"):
        Tensor.made += 1
        self.place = BASE + (Tensor.made << 20) % SIZE
        self.array, self.device = array, types.SimpleNamespace(type=device)
        self.dtype, self.shape = f"torch.{array.dtype.name}", array.shape

    def detach(self):
        return self

    def cpu(self):
        return Tensor(self.array)

    def numpy(self):
        return self.array

    def to(self, device):
        return Tensor(self.array, device.type)

    def copy_(self, other):
        self.array[...] = other.array

    def is_contiguous(self):
        return self.array.flags.c_contiguous

    def data_ptr(self):
        return self.place


def puppet_of_torch(waited):
    stream = types.SimpleNamespace(synchronize=lambda: waited.append(True))
    return types.SimpleNamespace(
        Tensor=Tensor, dtype=type(None), bfloat16="torch.bfloat16", float32="f", float16="h", from_numpy=Tensor,
        cuda=types.SimpleNamespace(current_stream=lambda device: stream),
        empty=lambda shape, dtype, device: Tensor(np.empty(shape, {"f": np.float32, "h": np.float16}[dtype]), device.type))


class Torch(ServerCase):
    def setUp(self):
        self.waited = []
        patch = mock.patch.dict(sys.modules, {"torch": puppet_of_torch(self.waited)})
        patch.start()
        self.addCleanup(patch.stop)

    def test_tensors_of_torch_on_a_gpu_are_copied_through_the_host_and_results_go_back_there(self):
        g = Golden()
        on_device = [Tensor(array, "cuda") for array in (g.x, g.ids, g.weights)]
        for transport in ("rpc", "ring"):
            with moed.Client(self.server.unix, transport=transport) as client:
                wanted = client.forward(1, g.x, g.ids, g.weights).output
                result = client.forward(1, *on_device, return_routing=True)
                self.assertEqual([one.device.type for one in (result.output, result.ids, result.weights)], ["cuda"] * 3)
                self.assertEqual(result.output.array.tobytes(), wanted.tobytes())
                out = Tensor(np.zeros_like(wanted), "cuda")
                self.assertIs(client.forward(1, *on_device, out=out).output, out)
                self.assertEqual(out.array.tobytes(), wanted.tobytes())
                packed = moed.quantize(on_device[0], "int8")
                self.assertEqual(client.forward(1, packed, output_dtype="f32").output.array.shape, (48, 256))

    def test_by_ipc_they_are_named_after_their_stream_finished_and_the_output_is_made_there(self):
        request, call = request_of(hidden=Tensor(np.ones((2, 64), np.float16), "cuda"))
        self.assertEqual((request.hidden.dtype, request.hidden.data, request.output_dtype), (3, b"", 3))
        self.assertTrue(request.HasField("output_memory") and self.waited)
        self.assertEqual((call.out.device.type, call.out.array.shape), ("cuda", (2, 64)))

    def test_a_server_whose_layers_are_on_the_host_says_so(self):
        with mock.patch.object(_cuda, "driver", lambda: _cuda.Driver(Library())):
            with moed.Client(self.server.unix, cuda="ipc") as client:
                with self.assertRaisesRegex(moed.InvalidArgument, "GPU|device"):
                    client.forward(1, Tensor(Golden().x, "cuda"))
                self.assertEqual(client.forward(1, Golden().x).output.shape, (48, 256))
