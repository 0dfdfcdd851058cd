// Python's interpreter lock, without Python's headers everywhere.
#pragma once

namespace lag {

// Releases the interpreter lock for a scope if the calling thread holds it.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* saved_ = nullptr;
};

}  // namespace lag
