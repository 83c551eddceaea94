// Schemas of the ops in C++, the Python module _C and the facts of this build.
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "metric_ring.h"
#ifdef DFLASH_WITH_CUDA
#include "cuda/metric_copier.h"
#endif

TORCH_LIBRARY(dflash_ext, m) {
  m.def(
      "pack_hidden("
      "Tensor[] layers, "
      "Tensor src_index, "
      "Tensor(a!) out, *, "
      "Tensor n_rows, "
      "Tensor(b!) high_water, "
      "int first_layer=0"
      ") -> ()");
  m.def(
      "lm_head_topk("
      "Tensor hidden, "
      "Tensor weight, "
      "int k=8, "
      "Tensor? labels=None, *, "
      "int? valid_vocab=None, "
      "float? softcap=None, "
      "float logit_scale=1.0"
      ") -> (Tensor values, Tensor indices, Tensor logsumexp, Tensor rank, Tensor label_logit)");
  m.def("metric_add(Tensor(a!) acc, Tensor rank, Tensor terms, Tensor weights) -> ()");
  m.def("metric_publish(Tensor(a!) acc, Tensor(b!) staging, Tensor(c!) step) -> ()");

  // Drafter ops: draft_loss, block_attention.
  m.def(
      "draft_loss("
      "Tensor hidden, "
      "Tensor weight, "
      "Tensor labels, "
      "Tensor weights, "
      "Tensor weight_sum, "
      "Tensor rows, "
      "Tensor n_rows, "
      "Tensor? teacher_hidden=None, "
      "Tensor? teacher_index=None, "
      "Tensor? teacher_tokens=None, "
      "Tensor? teacher_place=None, *, "
      "float ce_weight=1.0, "
      "float kl_weight=0.0, "
      "str kl=\"forward\", "
      "float cap_lambda=0.0, "
      "float? dpace_alpha=None, "
      "float? softcap=None, "
      "float logit_scale=1.0, "
      "int chunk_rows=2048, "
      "int? valid_vocab=None, "
      "bool need_grad=True"
      ") -> (Tensor loss, Tensor d_hidden, Tensor terms, Tensor rank, Tensor lse, Tensor used)");
  m.def(
      "block_attention("
      "Tensor q, "
      "Tensor k_ctx, "
      "Tensor v_ctx, "
      "Tensor k_blk, "
      "Tensor v_blk, "
      "Tensor ctx_start, "
      "Tensor ctx_end, *, "
      "float scale, "
      "int? window=None, "
      "bool causal=False"
      ") -> (Tensor out, Tensor lse)");
  m.def(
      "block_attention_backward("
      "Tensor grad_out, "
      "Tensor q, "
      "Tensor k_ctx, "
      "Tensor v_ctx, "
      "Tensor k_blk, "
      "Tensor v_blk, "
      "Tensor out, "
      "Tensor lse, "
      "Tensor ctx_start, "
      "Tensor ctx_end, "
      "Tensor(a!) dk_ctx, "
      "Tensor(b!) dv_ctx, *, "
      "float scale, "
      "int? window=None, "
      "bool causal=False"
      ") -> (Tensor dq, Tensor dk_blk, Tensor dv_blk)");
  // The same for one call alone: new gradients of the context, in its dtype.
  m.def(
      "block_attention_gradients("
      "Tensor grad_out, "
      "Tensor q, "
      "Tensor k_ctx, "
      "Tensor v_ctx, "
      "Tensor k_blk, "
      "Tensor v_blk, "
      "Tensor out, "
      "Tensor lse, "
      "Tensor ctx_start, "
      "Tensor ctx_end, *, "
      "float scale, "
      "int? window=None, "
      "bool causal=False"
      ") -> (Tensor dq, Tensor dk_ctx, Tensor dv_ctx, Tensor dk_blk, Tensor dv_blk)");
  // block_attention on Hopper, internal: ops/block_attention/triton.py calls it.
  m.def(
      "block_attention_forward_hopper("
      "Tensor q, "
      "Tensor k_ctx, "
      "Tensor v_ctx, "
      "Tensor k_blk, "
      "Tensor v_blk, "
      "Tensor ctx_start, "
      "Tensor ctx_end, *, "
      "float scale, "
      "int? window=None, "
      "bool causal=False"
      ") -> (Tensor out, Tensor lse)");
  // A step of block_attention_backward on Hopper, internal: ops/block_attention/triton.py calls it.
  m.def(
      "block_attention_context_gradients("
      "Tensor q, "
      "Tensor grad_out, "
      "Tensor shift, "
      "Tensor delta, "
      "Tensor k_ctx, "
      "Tensor v_ctx, "
      "Tensor ctx_start, "
      "Tensor ctx_end, "
      "Tensor sight, "
      "Tensor(a!) dk_ctx, "
      "Tensor(b!) dv_ctx, *, "
      "float scale, "
      "int? window=None, "
      "bool add=True"
      ") -> ()");
}

namespace py = pybind11;

namespace {

void push(dflash::MetricRing& ring, const at::Tensor& record) {
  TORCH_CHECK(record.device().is_cpu() && record.scalar_type() == at::kLong &&
                  record.is_contiguous() && record.numel() == ring.words(),
              "record: found ", record.toString(), record.sizes(), ", want contiguous int64[",
              ring.words(), "] on cpu");
  ring.push(record.const_data_ptr<int64_t>());
}

py::object pop(dflash::MetricRing& ring) {
  std::vector<int64_t> record(ring.words());
  bool found;
  {
    py::gil_scoped_release release;
    found = ring.pop(record.data());
  }
  return found ? py::cast(record) : py::none();
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.attr("torch_version") = DFLASH_TORCH_VERSION;
  m.attr("archs") = DFLASH_CUDA_ARCHS;
#ifdef DFLASH_WITH_CUDA
  m.attr("with_cuda") = true;
#else
  m.attr("with_cuda") = false;
#endif

  py::class_<dflash::MetricRing, std::shared_ptr<dflash::MetricRing>>(
      m, "MetricRing",
      "Records of int64 words from one publisher to one reader thread, without a lock: the "
      "publisher never waits, a reader that is overrun counts what it missed.")
      .def(py::init<int64_t, int64_t>(), py::arg("slots"), py::arg("words"))
      .def("push", &push, py::arg("record"), py::call_guard<py::gil_scoped_release>(),
           "Publishes int64[words]; one thread only.")
      .def("pop", &pop, "The oldest record not read yet as a list, or None; one thread only.")
      .def_property_readonly("dropped", &dflash::MetricRing::dropped,
                             "Records overwritten before they were read, as far as pop saw.");

#ifdef DFLASH_WITH_CUDA
  py::class_<dflash::MetricCopier>(
      m, "MetricCopier",
      "Copies the rows of a GPU's staging tensor into a ring, on a stream of its own.")
      .def(py::init<at::Tensor, int64_t>(), py::arg("staging"), py::arg("slots"),
           py::call_guard<py::gil_scoped_release>())
      .def("copy", &dflash::MetricCopier::copy, py::arg("step"),
           py::call_guard<py::gil_scoped_release>(),
           "Sends off the row of this step once the current stream has filled it, without a wait; "
           "one thread, ascending steps. A row overwritten before that is dropped and counted.")
      .def_property_readonly("ring", &dflash::MetricCopier::ring, "Where the records arrive.")
      .def_property_readonly("stream", &dflash::MetricCopier::stream, "The CUDA stream's handle.");
#endif
}
