// What ops/python_lock.h does while Python runs, ends, and is not there: Python's functions stand here, where the header
// finds them by their names. No other test has a Python that ends.
#include <gtest/gtest.h>

#include <memory>

#include "ops/python_lock.h"

namespace {

int is_initialized = 1, is_finalizing = 0, num_taken = 0, num_released = 0;

}  // namespace

extern "C" {
__attribute__((visibility("default"))) int Py_IsInitialized() { return is_initialized; }
__attribute__((visibility("default"))) int Py_IsFinalizing() { return is_finalizing; }
__attribute__((visibility("default"))) int PyGILState_Ensure() { return ++num_taken; }
__attribute__((visibility("default"))) void PyGILState_Release(int) { ++num_released; }
}

namespace torchtitan_ext::ops {
namespace {

struct Owner {
  explicit Owner(int& num_freed) : num_freed(&num_freed) {}
  Owner(Owner&& other) noexcept : num_freed(std::exchange(other.num_freed, nullptr)) {}
  ~Owner() {
    if (num_freed == nullptr) return;
    ++*num_freed;
    EXPECT_EQ(num_taken, num_released + is_initialized);  // under the lock
  }
  int* num_freed;
};

TEST(GiveBack, FreesUnderTheLockUnlessPythonEnds) {
  int num_freed = 0;
  Owner held(num_freed);
  give_back(std::move(held));
  EXPECT_EQ(num_freed, 1);
  EXPECT_EQ(num_taken, 1);
  EXPECT_EQ(num_released, 1);

  is_finalizing = 1;
  Owner stays(num_freed);
  give_back(std::move(stays));
  EXPECT_EQ(num_freed, 1);
  EXPECT_EQ(num_taken, 1);
  is_finalizing = 0;

  is_initialized = 0;
  Owner alone(num_freed);
  give_back(std::move(alone));
  EXPECT_EQ(num_freed, 2);
  EXPECT_EQ(num_taken, 1);
}

}  // namespace
}  // namespace torchtitan_ext::ops
