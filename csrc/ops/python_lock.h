// Python's lock, for code that is not linked with Python and may run without it.
#pragma once

#include <dlfcn.h>

#include <type_traits>
#include <utility>

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
  // Python has begun to end: a thread that asks for its lock then is ended where it stands, and in a destructor that
  // ends the process.
  static bool is_ending() { return python().is_finalizing != nullptr && python().is_finalizing() != 0; }

  PythonLock(const PythonLock&) = delete;
  PythonLock& operator=(const PythonLock&) = delete;

 private:
  struct Python {
    int (*is_initialized)();
    int (*ensure)();
    void (*release)(int state);
    int (*is_finalizing)();
  };

  template <typename Function>
  static Function find(const char* name) {
    return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
  }

  static const Python& python() {
    static const Python found = {find<int (*)()>("Py_IsInitialized"), find<int (*)()>("PyGILState_Ensure"),
                                 find<void (*)(int)>("PyGILState_Release"), find_is_finalizing()};
    return found;
  }

  // Public since Python 3.13, and there under this name before.
  static int (*find_is_finalizing())() {
    const auto found = find<int (*)()>("Py_IsFinalizing");
    return found != nullptr ? found : find<int (*)()>("_Py_IsFinalizing");
  }

  bool is_held_;
  int state_ = 0;
};

// Gives back under Python's lock what holds tensors. Where Python is ending it stays, as all else that the process has.
template <typename Owner>
void give_back(Owner&& owner) {
  if (PythonLock::is_ending()) {
    new std::remove_reference_t<Owner>(std::move(owner));
    return;
  }
  const PythonLock lock;
  const std::remove_reference_t<Owner> gone = std::move(owner);
}

}  // namespace torchtitan_ext::ops
