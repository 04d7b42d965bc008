// How the ranks of a group find out, through a store of keys and values, which of them holds up an operation. Here are no
// clock and no store: the caller says what time it is and what it has seen, and gets told what to do next.
//
// A rank that waits too long *calls*: it sets one key, which all ranks ask for about once a second. Each rank *answers*
// where it stands. The caller counts the answers, when all are there or its time is up, and writes the *verdict*; where
// the caller is lost too, another rank does, later. A verdict is written once, so all ranks read the same one.
//
//   key               value                            written by
//   call              the rank, its operation, why     the first rank that calls
//   answer/<rank>     whether it is at work, and where each rank that hears the call
//   verdict           who is silent, who is late       the caller, or who is first to take over
//   heard             how many have read the verdict   each rank; rank 0, which hosts the store, stays for it
//   failed/<name>     a rank and its error             the first rank that fails in the exchange of this name
//   out/<name>/<rank>                                  each rank that has come out of it, once one has failed
//
// Example: ranks 0 to 2, of which 1 was stopped.
//   rank 0, at 300 s   waits too long: sets call and answer/0, waits for answers
//   rank 2, at 301 s   reads call: sets answer/2, waits for the verdict
//   rank 0, at 305 s   one answer is missing: sets verdict (silent: 1), raises it, stays until rank 2 has heard
//   rank 2, at 305 s   reads verdict, raises it
//   rank 1, when it goes on: reads call and verdict, raises it
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace torchtitan_ext::core {

// Between two questions of a rank to the store. Ranks take 0.75 to 1.25 of it, by their numbers, so that thousands of
// them do not ask at once.
inline constexpr double kPollSeconds = 1.0;
double poll_seconds(int64_t rank);

// A rank hears of a call with its next question, and answers late while other code holds Python's lock.
inline constexpr double kRollCallSeconds = 5.0;
inline constexpr double kAnswerPollSeconds = 0.1;

// So much longer than the caller all others wait before one of them writes the verdict in its place.
inline constexpr double kTakeOverSeconds = 2.0;

// How long the rank that hosts the store stays for others that have to read the verdict.
inline constexpr double kLingerSeconds = 3.0;

// An answer of the store that is older may be from before this process was stopped.
inline constexpr double kFreshSeconds = 3.0;

// What a rank does next with the store.
struct StoreAction {
  enum class Kind {
    kSet,         // sets keys[0] to value
    kCompareSet,  // sets keys[0] to value, where nobody has set it
    kAdd,         // adds number to keys[0], and sees the sum
    kHasAll,      // sees whether all keys are set
    kRead,        // sees those of the keys that are set, with their values
    kWait,        // waits so many seconds, or until has_work()
    kRaise,       // there is a verdict()
    kEnd,         // nothing more
  };
  Kind kind = Kind::kEnd;
  std::vector<std::string> keys = {};
  std::string value = {};
  int64_t number = 0;
  double seconds = 0;

  bool operator==(const StoreAction&) const = default;
};

// What the last of the actions has seen.
using Seen = std::variant<std::monostate, bool, int64_t, std::map<std::string, std::string>>;

struct Verdict {
  std::string operation;
  std::string path;
  std::string phase;
  std::string doing;
  std::string why;
  std::vector<int64_t> silent;
  std::vector<std::pair<int64_t, std::string>> late;  // ranks that are at work still, and where
  int64_t num_answers = 0;
};

// One rank in one operation. Times are in seconds of one clock. A thread asks the store: it calls `next` and does what it
// says. The thread of the operation calls all else. Both hold one lock meanwhile.
class RollCall {
 public:
  // `ranks` are those of the group. This rank waits `timeout_seconds` for others in one phase, its own part done, and as
  // a caller `answer_seconds` for their answers.
  RollCall(std::string operation, std::string path, int64_t rank, std::vector<int64_t> ranks, double timeout_seconds,
           double now, double answer_seconds = kRollCallSeconds);

  // A store that is silent for so long counts as lost.
  double patience_seconds() const { return answer_seconds_ + 2 * kTakeOverSeconds; }

  // ---- Where this rank stands ----
  // It works in a phase from now on; its deadline counts from its first wait in it. Any exchange has ended.
  void begin(double now, std::string phase, std::string doing);
  // It works on this key of the phase.
  void at(std::string key) { standing_.key = std::move(key); }
  // Its own part is done: it waits for others.
  void wait(double now);
  double seconds_left(double now) const { return deadline_ ? *deadline_ - now : timeout_seconds_; }
  const std::string& phase() const { return standing_.phase; }
  const std::string& doing() const { return standing_.doing; }

  // It gives up, and says why. `is_late`: it has waited in vain for ranks that are at work.
  void call(std::string why, bool is_late) { reason_ = {std::move(why), is_late}; }
  // The operation ends. A call is brought to its end all the same.
  void close() { is_closed_ = true; }

  // ---- An exchange: work of the phase that itself waits for other ranks ----
  // `name` is that of no other exchange on the group, the same on all ranks.
  void enter_exchange(std::string name);
  // It comes out, perhaps by an error. Returns whether another rank had failed before.
  bool leave_exchange(std::optional<std::string> error);
  // The position of the rank in the group that failed first, and its error, as far as this rank knows.
  std::optional<std::pair<int64_t, std::string>> failure() const;
  // Whether all ranks are out, as a rank that failed knows.
  bool all_are_out() const { return exchange_ && exchange_->all_are_out; }

  // ---- The store ----
  // What to do in this order, by what was seen with the last of the actions before.
  std::vector<StoreAction> next(double now, const Seen& seen);
  // Whether a wait between two questions ends at once.
  bool has_work() const;
  // Has the next question asked at once, unless the answer to one asked within kFreshSeconds is there. Returns whether
  // it is.
  bool is_fresh(double now);
  // Whether the store has answered yet.
  bool has_answered() const { return last_quiet_.has_value(); }
  const std::optional<Verdict>& verdict() const { return verdict_; }

 private:
  struct Standing {
    std::string phase;
    std::string doing;
    double since = 0;
    bool is_at_work = true;
    std::string key;
  };
  struct Exchange {
    std::string name;
    bool is_out = false;
    std::optional<std::string> own_error;
    std::optional<std::pair<int64_t, std::string>> failure;
    bool all_are_out = false;
  };
  // What it is that the store was asked last.
  enum class Asked { kNothing, kFailure, kAllOut, kCall, kVerdict, kAllAnswers, kAnswers, kHeard };
  using Actions = std::vector<StoreAction>;

  Actions read(std::string key, Asked asked);
  Actions share_failure();
  Actions share_end();
  Actions ask_for_call();
  Actions hear_call(double now, const std::map<std::string, std::string>& seen);
  Actions hear_verdict(double now, const std::map<std::string, std::string>& seen);
  Actions poll_verdict();
  Actions count(const std::map<std::string, std::string>& answers);
  Actions linger(double now, int64_t num_heard);
  std::vector<std::string> keys_of_ranks(const std::string& prefix) const;

  std::string operation_;
  std::string path_;
  int64_t rank_;
  std::vector<int64_t> ranks_;
  double timeout_seconds_;
  double answer_seconds_;
  Standing standing_;
  std::optional<double> deadline_;
  std::optional<std::pair<std::string, bool>> reason_;
  bool is_closed_ = false;
  std::shared_ptr<Exchange> exchange_;

  Asked asked_ = Asked::kNothing;
  std::shared_ptr<Exchange> shared_;  // the exchange as it was when its keys were asked for
  double asked_at_ = 0;
  std::optional<double> last_quiet_;
  bool is_asked_ = false;
  std::string call_;
  bool is_caller_ = false;
  double count_at_ = 0;
  std::optional<Verdict> read_verdict_;
  std::optional<Verdict> verdict_;
  std::optional<double> linger_until_;
};

}  // namespace torchtitan_ext::core
