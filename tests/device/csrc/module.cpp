// The Python module `lagdev`: what tests steer and read. `lag.py` beside this folder is its face.
#include "copies.h"
#include "counters.h"
#include "gil.h"
#include "guard.h"
#include "memory.h"
#include "runtime.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace lag {

WithoutGil::WithoutGil() {
  if (Py_IsInitialized() && PyGILState_Check()) saved_ = PyEval_SaveThread();
}

WithoutGil::~WithoutGil() {
  if (saved_) PyEval_RestoreThread(static_cast<PyThreadState*>(saved_));
}

}  // namespace lag

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  // torch translates C++ errors for its own functions only.
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const c10::Error& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
    }
  });
  const auto no_gil = py::call_guard<py::gil_scoped_release>();

  m.attr("DEVICES") = static_cast<int>(lag::kDevices);
  m.attr("POOL_STREAMS") = static_cast<int>(lag::kPoolStreams);
  m.attr("POISON") = static_cast<int>(lag::kPoison);
  m.def("register_with_torch", &lag::register_with_torch);
  m.def("in_forked_child", &lag::forked);

  m.def("latch_hold", &lag::latch_hold, no_gil);
  m.def("latch_open", &lag::latch_open, no_gil);
  m.def("latch_is_open", &lag::latch_is_open, no_gil);
  m.def("latch_open_all", &lag::latch_open_all, no_gil);
  m.def("latch_open_on_wait", &lag::latch_open_on_wait, no_gil);
  m.def("drain", &lag::drain, no_gil);

  m.def("counters", &lag::counters_snapshot, no_gil);
  m.def("counters_reset", &lag::counters_reset, no_gil);
  m.def("forbid_device_sync", &lag::forbid_device_sync, no_gil);
  m.def("fail_d2h", &lag::fail_d2h, no_gil);
  m.def("clear_faults", &lag::clear_faults, no_gil);

  m.def("device_memory", &lag::device_memory_stats, no_gil);
  m.def("device_memory_reset_peak", &lag::device_memory_reset_peak, no_gil);
  m.def("device_memory_set_limit", &lag::device_memory_set_limit, no_gil);
  m.def("device_memory_trim", &lag::device_memory_trim, no_gil);
  m.def("host_memory", &lag::host_memory_stats, no_gil);
  m.def("host_memory_set_limit", &lag::host_memory_set_limit, no_gil);
  m.def("host_memory_reset_peak", &lag::host_memory_reset_peak, no_gil);
  m.def("host_memory_trim", &lag::host_memory_trim, no_gil);
  m.def("host_register", &lag::host_register, no_gil);
  m.def("host_unregister", &lag::host_unregister, no_gil);
}
