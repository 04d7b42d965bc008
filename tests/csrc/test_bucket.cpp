#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "core/bucket.h"

namespace torchtitan_ext::core {
namespace {

TEST(ScheduleMessages, ExampleOfTheHeader) {
  const std::vector<int64_t> sizes = {10, 300, 20, 500};
  const Schedule schedule = schedule_messages(sizes, 256, 128);
  const std::vector<Segment> segments = {{1, 0, 192, 0},   {1, 192, 108, 0}, {3, 0, 256, 0},
                                         {3, 256, 244, 0}, {0, 0, 10, 0},    {2, 0, 20, 16}};
  EXPECT_EQ(schedule.segments, segments);
  const std::vector<Message> messages = {{0, 1, 192, 0}, {1, 1, 108, 0}, {2, 1, 256, 0}, {3, 1, 244, 0}, {4, 2, 36, 0}};
  EXPECT_EQ(schedule.messages, messages);
  EXPECT_EQ(schedule.flights.size(), 5u);
}

TEST(ScheduleMessages, NothingToSend) {
  EXPECT_TRUE(schedule_messages({}, 64, 64).flights.empty());
  const std::vector<int64_t> empty = {0, 0};
  EXPECT_TRUE(schedule_messages(empty, 64, 64).flights.empty());
}

TEST(ScheduleMessages, EveryByteOnceAndWithinBounds) {
  std::mt19937 random(0);
  for (int repeat = 0; repeat < 2000; ++repeat) {
    std::vector<int64_t> sizes(random() % 20);
    for (int64_t& size : sizes) size = random() % (random() % 4 == 0 ? 3000 : 100);
    const int64_t bucket = 64 * (1 + random() % 10), direct = random() % 400;
    const Schedule schedule = schedule_messages(sizes, bucket, direct);
    std::vector<int64_t> sent(sizes.size(), 0);
    int64_t next_segment = 0, next_message = 0;
    for (const Flight& flight : schedule.flights) {
      ASSERT_EQ(flight.first_message, next_message);
      ASSERT_LE(flight.num_bytes, bucket);
      int64_t flight_end = 0;
      for (; next_message < flight.first_message + flight.num_messages; ++next_message) {
        const Message& message = schedule.messages[next_message];
        ASSERT_EQ(message.first_segment, next_segment);
        ASSERT_EQ(message.flight_bytes % kPieceBytes, 0);
        ASSERT_GE(message.flight_bytes, flight_end);
        flight_end = message.flight_bytes + message.num_bytes;
        int64_t message_end = 0;
        for (; next_segment < message.first_segment + message.num_segments; ++next_segment) {
          const Segment& segment = schedule.segments[next_segment];
          ASSERT_GE(segment.message_bytes, message_end);
          ASSERT_EQ(segment.first_byte, sent[segment.tensor]);
          ASSERT_EQ(segment.first_byte % kPieceBytes, 0);
          ASSERT_GT(segment.num_bytes, 0);
          sent[segment.tensor] += segment.num_bytes;
          message_end = segment.message_bytes + segment.num_bytes;
        }
        ASSERT_EQ(message_end, message.num_bytes);
      }
      ASSERT_EQ(flight_end, flight.num_bytes);
    }
    ASSERT_EQ(next_message, static_cast<int64_t>(schedule.messages.size()));
    ASSERT_EQ(next_segment, static_cast<int64_t>(schedule.segments.size()));
    ASSERT_EQ(sent, sizes);
  }
}

}  // namespace
}  // namespace torchtitan_ext::core
