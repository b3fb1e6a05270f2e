#include <atomic>
#include <condition_variable>
#include <mutex>

#include "ffi/handlers/handler.h"

namespace dj {

namespace {

// One call of dj_pool.run. The caller works too, and waits only for parts that others have begun: threads that never come
// (all of them may be inside such a call) cannot block it.
struct Job {
  int64_t count;
  void (*task)(void*, int64_t);
  void* context;
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::condition_variable ended;
  int64_t done = 0;

  void work() {
    int64_t mine = 0;
    for (int64_t i; (i = next.fetch_add(1)) < count; ++mine) task(context, i);
    if (mine == 0) return;
    const std::lock_guard<std::mutex> lock(mutex);
    done += mine;
    if (done == count) ended.notify_all();
  }
};

void run_on_threads(void* self, int64_t count, void (*task)(void*, int64_t), void* context) {
  auto* threads = static_cast<ffi::ThreadPool*>(self);
  const auto job = std::make_shared<Job>();
  job->count = count;
  job->task = task;
  job->context = context;
  const int64_t helpers = std::min<int64_t>(threads->num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; ++i) threads->Schedule([job] { job->work(); });
  job->work();
  std::unique_lock<std::mutex> lock(job->mutex);
  job->ended.wait(lock, [&] { return job->done == count; });
}

}  // namespace

std::vector<Target>& targets() {
  static std::vector<Target> table;
  return table;
}

Stream::Stream(ffi::ThreadPool threads) : threads_(std::make_shared<ffi::ThreadPool>(threads)) {
  pool_.self = threads_.get();
  pool_.threads = static_cast<int32_t>(threads_->num_threads());
  pool_.run = run_on_threads;
}

}  // namespace dj
