"""RMSNorm of engines that have no implementation here, each as a function of NumPy arrays: x and the gain to y."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

EPS = 1e-5
Norm = Callable[[Any, Any], Any]  # of x and the gain, arrays of NumPy


def onnx_model(x: Any, weight: Any, *, operator: bool) -> bytes:
    """RMSNormalization of opset 23, or the same as separate operators in the dtype of x, with sizes that are free."""
    onnx = importlib.import_module("onnx")
    helper = onnx.helper
    types = [helper.np_dtype_to_tensor_dtype(array.dtype) for array in (x, weight)]
    sizes = [f"d{i}" for i in range(x.ndim)]
    if operator:
        nodes = [helper.make_node("RMSNormalization", ["x", "weight"], ["y"], epsilon=EPS)]
        tensors = []
    else:
        if x.dtype != weight.dtype:
            raise TypeError("the operators of ONNX take two tensors of one dtype")
        nodes = [
            helper.make_node("Mul", ["x", "x"], ["square"]),
            helper.make_node("ReduceMean", ["square", "last"], ["mean"]),
            helper.make_node("Add", ["mean", "eps"], ["sum"]),
            helper.make_node("Sqrt", ["sum"], ["root"]),
            helper.make_node("Div", ["x", "root"], ["normalised"]),
            helper.make_node("Mul", ["normalised", "weight"], ["y"]),
        ]
        arrays = {"last": np.array([-1]), "eps": np.array(EPS, x.dtype)}
        tensors = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(
        nodes,
        "rms_norm",
        [helper.make_tensor_value_info("x", types[0], sizes),
         helper.make_tensor_value_info("weight", types[1], sizes[-1:])],
        [helper.make_tensor_value_info("y", types[1], sizes)],
        tensors,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    return bytes(model.SerializeToString())


def for_each_kind(build: Callable[[Any, Any], Norm]) -> Norm:
    """A function that builds a program once for each number of axes and pair of dtypes, and gives it dense arrays."""
    programs: dict[Any, Norm | Exception] = {}

    def norm(x: Any, weight: Any) -> Any:
        x, weight = np.ascontiguousarray(x), np.ascontiguousarray(weight)
        kind = (x.ndim, x.dtype, weight.dtype)
        if kind not in programs:
            try:
                programs[kind] = build(x, weight)
            except Exception as error:  # an engine may raise anything for a dtype that it does not have
                programs[kind] = error
        program = programs[kind]
        if isinstance(program, Exception):
            raise program
        return program(x, weight)

    return norm


def with_onnxruntime(operator: bool) -> Norm:
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4

    def build(x: Any, weight: Any) -> Norm:
        model = onnx_model(x, weight, operator=operator)
        session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return lambda x, weight: session.run(None, {"x": x, "weight": weight})[0]

    return for_each_kind(build)


def with_onnx_reference() -> Norm:
    reference = importlib.import_module("onnx.reference")

    def build(x: Any, weight: Any) -> Norm:
        evaluator = reference.ReferenceEvaluator(onnx_model(x, weight, operator=True))
        return lambda x, weight: evaluator.run(None, {"x": x, "weight": weight})[0]

    return for_each_kind(build)


def with_openvino(operator: bool) -> Norm:
    ov = importlib.import_module("openvino")
    core = ov.Core()

    def build(x: Any, weight: Any) -> Norm:
        if x.dtype == ml_dtypes.bfloat16:
            raise TypeError("its Python package has no array in bfloat16")
        model = core.read_model(onnx_model(x, weight, operator=operator), b"")
        compiled = core.compile_model(model, "CPU")
        return lambda x, weight: np.array(compiled([x, weight])[0])

    return for_each_kind(build)


def with_tinygrad() -> Norm:
    tinygrad = importlib.import_module("tinygrad")
    nn = importlib.import_module("tinygrad.nn")

    def send(array: Any) -> Any:
        array = np.ascontiguousarray(array)
        if array.dtype == ml_dtypes.bfloat16:
            return tinygrad.Tensor(array.view(np.uint16)).bitcast(tinygrad.dtypes.bfloat16)
        return tinygrad.Tensor(array)

    def norm(x: Any, weight: Any) -> Any:
        layer = nn.RMSNorm(x.shape[-1], eps=EPS)
        layer.weight = send(weight)
        y = layer(send(x)).realize()
        if y.dtype == tinygrad.dtypes.bfloat16:
            return y.bitcast(tinygrad.dtypes.uint16).numpy().view(ml_dtypes.bfloat16)
        return y.numpy()

    return norm


def with_mlx(fused: bool) -> Norm:
    mx = importlib.import_module("mlx.core")
    mx.set_default_device(mx.cpu)

    def send(array: Any) -> Any:
        array = np.ascontiguousarray(array)
        if array.dtype == ml_dtypes.bfloat16:
            return mx.array(array.view(np.uint16)).view(mx.bfloat16)
        if array.dtype == np.float64:
            raise TypeError("mlx would turn float64 into float32")
        return mx.array(array)

    def operations(x: Any, weight: Any) -> Any:
        return x * mx.rsqrt(mx.mean(mx.square(x), axis=-1, keepdims=True) + EPS) * weight

    def norm(x: Any, weight: Any) -> Any:
        x, weight = send(x), send(weight)
        y = mx.fast.rms_norm(x, weight, EPS) if fused else operations(x, weight)
        return np.array(y.view(mx.uint16)).view(ml_dtypes.bfloat16) if y.dtype == mx.bfloat16 else np.array(y)

    return norm


def with_paddle(fused: bool) -> Norm:
    paddle = importlib.import_module("paddle")
    paddle.set_device("cpu")

    def send(array: Any) -> Any:
        array = np.ascontiguousarray(array)
        if array.dtype == ml_dtypes.bfloat16:
            return paddle.to_tensor(array.view(np.int16)).view("bfloat16")
        return paddle.to_tensor(array)

    def operations(x: Any, weight: Any) -> Any:
        return x * paddle.rsqrt(paddle.mean(paddle.square(x), -1, keepdim=True) + EPS) * weight

    def norm(x: Any, weight: Any) -> Any:
        x, weight = send(x), send(weight)
        y = paddle.nn.functional.rms_norm(x, x.shape[-1:], weight, EPS) if fused else operations(x, weight)
        return y.view("int16").numpy().view(ml_dtypes.bfloat16) if y.dtype == paddle.bfloat16 else y.numpy()

    return norm


def with_tract(operator: bool) -> Norm:
    tract = importlib.import_module("tract")

    def build(x: Any, weight: Any) -> Norm:
        if x.dtype == ml_dtypes.bfloat16:
            raise TypeError("its Python package has no array in bfloat16")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "norm.onnx"
            path.write_bytes(onnx_model(x, weight, operator=operator))
            program = tract.onnx().load(str(path)).into_model().into_runnable()
        return lambda x, weight: program.run([x, weight])[0].to_numpy()

    return for_each_kind(build)


def with_iree(operator: bool) -> Norm:
    compiler, runtime = importlib.import_module("iree.compiler"), importlib.import_module("iree.runtime")

    def build(x: Any, weight: Any) -> Norm:
        with tempfile.TemporaryDirectory() as folder:
            model, program = (str(Path(folder) / name) for name in ("norm.onnx", "norm.mlir"))
            Path(model).write_bytes(onnx_model(x, weight, operator=operator))
            read = [sys.executable, "-m", "iree.compiler.tools.import_onnx", model, "-o", program]
            subprocess.run(read, check=True, capture_output=True)
            flags = ["--iree-llvmcpu-target-cpu=host"]
            compiled = compiler.compile_file(program, target_backends=["llvm-cpu"], input_type="onnx", extra_args=flags)
        module = runtime.load_vm_flatbuffer(compiled, driver="local-task")
        return lambda x, weight: np.array(module["rms_norm"](x, weight).to_host())

    return for_each_kind(build)


def with_candle() -> Norm:
    candle, llama = importlib.import_module("candle"), importlib.import_module("candle.models.llama")
    names = {"float32": candle.f32, "float16": candle.f16, "bfloat16": candle.bf16}

    def send(array: Any) -> Any:  # by way of Python's numbers, which it takes in float32: exact in these dtypes
        return candle.tensor(array.astype(np.float32).reshape(-1).tolist()).to_dtype(names[array.dtype.name])

    def norm(x: Any, weight: Any) -> Any:
        layer = llama.RmsNorm.__new__(llama.RmsNorm)  # its constructor takes a quantised tensor
        candle.nn.Module.__init__(layer)
        layer.weight = send(weight)
        y = layer.forward(send(x).reshape((1, x.size // x.shape[-1], x.shape[-1])))
        return np.array(y.to_dtype(candle.f32).values(), x.dtype).reshape(x.shape)

    return norm


def with_executorch() -> Norm:
    torch, exir = importlib.import_module("torch"), importlib.import_module("executorch.exir")
    xnnpack = importlib.import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner")
    runtime = importlib.import_module("executorch.runtime").Runtime.get()

    class Norm(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        def forward(self, x: Any, weight: Any) -> Any:
            return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, EPS)

    def send(array: Any) -> Any:
        array = np.array(array, order="C")
        half = array.dtype == ml_dtypes.bfloat16
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if half else torch.from_numpy(array)

    @functools.cache
    def method(dtype: str, other: str, wide: bool) -> Any:  # memory is planned for the largest x
        example = send(np.ones((4, 64), dtype)), send(np.ones(64, other))
        most = (64, 2**18) if wide else (4096, 4096)
        rows, size = (torch.export.Dim(f"size{i}", min=i + 1, max=limit) for i, limit in enumerate(most))
        exported = torch.export.export(Norm(), example, dynamic_shapes=({0: rows, 1: size}, {0: size}))
        lowered = exir.to_edge_transform_and_lower(exported, partitioner=[xnnpack.XnnpackPartitioner()])
        program = runtime.load_program(lowered.to_executorch().buffer)
        return program, program.load_method("forward")

    def norm(x: Any, weight: Any) -> Any:
        _, program = method(x.dtype.name, weight.dtype.name, x.shape[-1] > 4096)
        y = program.execute([send(x.reshape(-1, x.shape[-1])), send(weight)])[0].clone()
        half = y.dtype == torch.bfloat16
        return (y.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if half else y.numpy()).reshape(x.shape)

    return norm


def with_ncnn() -> Norm:
    ncnn = importlib.import_module("ncnn")

    @functools.cache
    def layer(width: int, gain: bytes) -> Any:
        net = ncnn.Net()
        text = f"7767517\n2 2\nInput x 0 1 x\nRMSNorm y 1 1 x y 0={width} 1={EPS!r} 2=1\n"
        with tempfile.TemporaryDirectory() as folder:
            names = [os.path.join(folder, name) for name in ("n.param", "n.bin")]
            Path(names[0]).write_text(text)
            Path(names[1]).write_bytes(gain)
            if net.load_param(names[0]) or net.load_model(names[1]):
                raise ValueError("ncnn cannot load the layer RMSNorm")
        return net

    def norm(x: Any, weight: Any) -> Any:
        if x.dtype != np.float32 or weight.dtype != np.float32:
            raise TypeError("its Mat is given in float32 here")
        width = x.shape[-1]
        rows = np.ascontiguousarray(x).reshape(-1, width)
        extractor = layer(width, np.ascontiguousarray(weight).tobytes()).create_extractor()
        extractor.input("x", ncnn.Mat(rows).clone())  # it ends the process where the memory is NumPy's
        _, y = extractor.extract("y")
        return np.array(y).reshape(x.shape)

    return norm


def with_litert() -> Norm:
    """The operators SQUARE, MEAN, ADD, RSQRT, MUL, MUL, written with the schema that its package has."""
    interpreter = importlib.import_module("ai_edge_litert.interpreter")
    schema = importlib.import_module("ai_edge_litert.schema_py_generated")
    types = {"float32": schema.TensorType.FLOAT32, "float16": schema.TensorType.FLOAT16,
             "bfloat16": schema.TensorType.BFLOAT16}  # fmt: skip

    def model(x: Any) -> bytes:
        flatbuffers = importlib.import_module("flatbuffers")

        flat, kind = schema.ModelT(), types[x.dtype.name]
        flat.version, flat.buffers, flat.operatorCodes = 3, [schema.BufferT()], []
        graph = schema.SubGraphT()
        graph.tensors, graph.operators = [], []

        def tensor(shape: Sequence[int], value: Any = None, kind: int = kind) -> int:
            entry = schema.TensorT()
            entry.type, entry.shape, entry.buffer = kind, list(shape), 0
            if value is not None:
                data = schema.BufferT()
                data.data = np.frombuffer(value.tobytes(), np.uint8)
                flat.buffers.append(data)
                entry.buffer = len(flat.buffers) - 1
            graph.tensors.append(entry)
            return len(graph.tensors) - 1

        def operator(name: str, inputs: Sequence[int], shape: Sequence[int], options: str = "") -> int:
            code = schema.OperatorCodeT()
            code.builtinCode = getattr(schema.BuiltinOperator, name)
            code.deprecatedBuiltinCode = code.builtinCode
            code.version = 1
            flat.operatorCodes.append(code)
            entry, output = schema.OperatorT(), tensor(shape)
            entry.opcodeIndex, entry.inputs, entry.outputs = len(flat.operatorCodes) - 1, list(inputs), [output]
            if options:
                entry.builtinOptionsType = getattr(schema.BuiltinOptions, options)
                entry.builtinOptions = getattr(schema, f"{options}T")()
                if options == "ReducerOptions":
                    entry.builtinOptions.keepDims = True
            graph.operators.append(entry)
            return output

        one = (*x.shape[:-1], 1)
        inputs = [tensor(x.shape), tensor(x.shape[-1:])]
        axis = tensor([1], np.array([x.ndim - 1], np.int32), schema.TensorType.INT32)
        mean = operator("MEAN", [operator("SQUARE", inputs[:1], x.shape), axis], one, "ReducerOptions")
        total = operator("ADD", [mean, tensor([], np.array(EPS, x.dtype))], one, "AddOptions")
        normalised = operator("MUL", [inputs[0], operator("RSQRT", [total], one)], x.shape, "MulOptions")
        graph.inputs = inputs
        graph.outputs = [operator("MUL", [normalised, inputs[1]], x.shape, "MulOptions")]
        flat.subgraphs = [graph]
        builder = flatbuffers.Builder(1024)
        builder.Finish(flat.Pack(builder), b"TFL3")
        return bytes(builder.Output())

    @functools.cache
    def program(shape: tuple[int, ...], dtype: str) -> Any:
        runner = interpreter.Interpreter(model_content=model(np.zeros(shape, dtype)))
        runner.allocate_tensors()
        return runner

    def norm(x: Any, weight: Any) -> Any:
        if x.dtype != weight.dtype:
            raise TypeError("its operators take two tensors of one dtype")
        runner = program(x.shape, x.dtype.name)
        for detail, array in zip(runner.get_input_details(), (x, weight), strict=True):
            runner.set_tensor(detail["index"], np.ascontiguousarray(array))
        runner.invoke()
        return runner.get_tensor(runner.get_output_details()[0]["index"])

    return norm


def with_numpy() -> Norm:
    def norm(x: Any, weight: Any) -> Any:
        wide = x.astype(np.float32)
        mean = (wide * wide).mean(-1, keepdims=True)
        return (wide / np.sqrt(mean + np.float32(EPS)) * weight.astype(np.float32)).astype(x.dtype)

    return norm
