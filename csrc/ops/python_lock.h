// Python's lock, for code that is not linked with Python and may run without it.
#pragma once

#include <dlfcn.h>

namespace torchtitan_ext::ops {

// Held while a list of tensors is given back: a tensor that Python holds too tells it when the last other owner lets
// go, and torch takes the lock for that, tensor by tensor. Of 5,000 tensors that is 0.4 ms, unless it is held already.
class PythonLock {
 public:
  PythonLock() : is_held_(python().is_initialized != nullptr && python().is_initialized() != 0) {
    if (is_held_) state_ = python().ensure();
  }
  ~PythonLock() {
    if (is_held_) python().release(state_);
  }
  PythonLock(const PythonLock&) = delete;
  PythonLock& operator=(const PythonLock&) = delete;

 private:
  struct Python {
    int (*is_initialized)();
    int (*ensure)();
    void (*release)(int state);
  };

  template <typename Function>
  static Function find(const char* name) {
    return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
  }

  static const Python& python() {
    static const Python found = {find<int (*)()>("Py_IsInitialized"), find<int (*)()>("PyGILState_Ensure"),
                                 find<void (*)(int)>("PyGILState_Release")};
    return found;
  }

  bool is_held_;
  int state_ = 0;
};

}  // namespace torchtitan_ext::ops
