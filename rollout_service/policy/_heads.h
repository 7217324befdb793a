/* The heads of an actor-critic with a categorical distribution, and the way back. Vectors and exp as in _tiles.h.

   Axis letters: M rows, H features, C choices; head C is the value. Arrays are float32, C order: features [M, H], weights
   [C, H] and [1, H], log_p [C, M]; actions are int64 [M], from `start` on; all others [M]. */

#include <math.h>

typedef struct { Py_ssize_t rows, features, choices, start; } Heads;

INLINE const float *head_weight(const Heads *s, const float *policy, const float *value, Py_ssize_t head)
{
    return head < s->choices ? policy + head * s->features : value;
}

INLINE __m512 exponential(__m512 x) { return power_of_two(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f))); }

/* Lanes of the given rows whose action is this choice. */
INLINE __mmask16 chosen(const Heads *s, const int64_t *actions, int count, Py_ssize_t choice)
{
    unsigned found = 0;
    for (int r = 0; r < count; r++)
        found |= (unsigned)(actions[r] - s->start == choice) << r;
    return (__mmask16)found;
}

AVX512 static void heads_forward(const Heads *s, const float *features, const float *policy, const float *policy_bias,
                                 const float *value, const float *value_bias, const int64_t *actions, float *log_p,
                                 float *values, float *log_probs, float *entropy)
{
    for (Py_ssize_t first = 0; first < s->rows; first += LANES) {
        const int count = s->rows - first < LANES ? (int)(s->rows - first) : LANES;
        const __mmask16 within = (__mmask16)((1u << count) - 1);
        __m512 highest = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps(), mean = sum, taken = sum;
        for (Py_ssize_t head = 0; head <= s->choices; head++) {
            const float *weight = head_weight(s, policy, value, head);
            float products[LANES] = {0.0f};
            for (int r = 0; r < count; r++) {
                __m512 product = _mm512_setzero_ps();
                for (Py_ssize_t h = 0; h < s->features; h += LANES)
                    product = _mm512_fmadd_ps(_mm512_loadu_ps(features + (first + r) * s->features + h),
                                              _mm512_loadu_ps(weight + h), product);
                products[r] = _mm512_reduce_add_ps(product);
            }
            float bias = head < s->choices ? policy_bias[head] : *value_bias;
            __m512 out = _mm512_add_ps(_mm512_loadu_ps(products), _mm512_set1_ps(bias));
            _mm512_mask_storeu_ps((head < s->choices ? log_p + head * s->rows : values) + first, within, out);
            if (head < s->choices)
                highest = _mm512_max_ps(highest, out);
        }
        for (Py_ssize_t c = 0; c < s->choices; c++) {
            __m512 logit = _mm512_maskz_loadu_ps(within, log_p + c * s->rows + first);
            sum = _mm512_add_ps(sum, exponential(_mm512_sub_ps(logit, highest)));
        }
        float logs[LANES];
        _mm512_storeu_ps(logs, sum);
        for (int r = 0; r < LANES; r++)
            logs[r] = logf(logs[r]);
        const __m512 log_sum = _mm512_add_ps(highest, _mm512_loadu_ps(logs));
        for (Py_ssize_t c = 0; c < s->choices; c++) {
            __m512 log_of = _mm512_sub_ps(_mm512_maskz_loadu_ps(within, log_p + c * s->rows + first), log_sum);
            mean = _mm512_fmadd_ps(exponential(log_of), log_of, mean);
            taken = _mm512_mask_mov_ps(taken, chosen(s, actions + first, count, c), log_of);
            _mm512_mask_storeu_ps(log_p + c * s->rows + first, within, log_of);
        }
        _mm512_mask_storeu_ps(log_probs + first, within, taken);
        _mm512_mask_storeu_ps(entropy + first, within, _mm512_sub_ps(_mm512_setzero_ps(), mean));
    }
}

/* A tile of rows: back [TILE] of this head times its weights into by_features, and times the features into by_weight. */
INLINE void head_backward(const int rows, const Heads *s, const float *features, const float *weight, const float *back,
                          bool begin, float *by_features, float *by_weight)
{
    for (Py_ssize_t h = 0; h < s->features; h += LANES) {
        const __m512 factor = _mm512_loadu_ps(weight + h);
        __m512 total = _mm512_loadu_ps(by_weight + h);
        EACH(r, rows) {
            const __m512 slope = _mm512_set1_ps(back[r]);
            float *to = by_features + r * s->features + h;
            __m512 old = begin ? _mm512_setzero_ps() : _mm512_loadu_ps(to);
            _mm512_storeu_ps(to, _mm512_fmadd_ps(slope, factor, old));
            total = _mm512_fmadd_ps(slope, _mm512_loadu_ps(features + r * s->features + h), total);
        }
        _mm512_storeu_ps(by_weight + h, total);
    }
}

/* With H the entropy and a the action, at logit j: d log p_a = [j = a] - p_j, dH = -p_j (log p_j + H). */
AVX512 static void heads_backward(const Heads *s, const float *features, const float *policy, const float *value,
                                  const int64_t *actions, const float *log_p, const float *entropy,
                                  const float *by_log_prob, const float *by_value, const float *by_entropy,
                                  float *by_features, float *by_policy, float *by_policy_bias, float *by_value_weight,
                                  float *by_value_bias)
{
    memset(by_policy, 0, s->choices * s->features * sizeof(float));
    memset(by_policy_bias, 0, s->choices * sizeof(float));
    memset(by_value_weight, 0, s->features * sizeof(float));
    *by_value_bias = 0.0f;
    for (Py_ssize_t first = 0; first < s->rows; first += TILE, features += TILE * s->features) {
        const int count = tile_rows(s->rows - first);
        const __mmask16 within = (__mmask16)((1u << count) - 1);
        const __m512 by_log = _mm512_maskz_loadu_ps(within, by_log_prob + first);
        const __m512 by_mean = _mm512_maskz_loadu_ps(within, by_entropy + first);
        const __m512 mean = _mm512_maskz_loadu_ps(within, entropy + first);
        for (Py_ssize_t head = 0; head <= s->choices; head++) {
            const bool is_value = head == s->choices;
            float back[LANES];
            __m512 slope;
            if (is_value) {
                slope = _mm512_maskz_loadu_ps(within, by_value + first);
            } else {
                __m512 log_of = _mm512_maskz_loadu_ps(within, log_p + head * s->rows + first);
                slope = _mm512_fmadd_ps(by_mean, _mm512_add_ps(log_of, mean), by_log);
                slope = _mm512_maskz_mul_ps(within, slope, exponential(log_of));
                slope = _mm512_sub_ps(_mm512_maskz_mov_ps(chosen(s, actions + first, count, head), by_log), slope);
            }
            _mm512_storeu_ps(back, slope);
            *(is_value ? by_value_bias : by_policy_bias + head) += _mm512_reduce_add_ps(slope);
            float *by_weight = is_value ? by_value_weight : by_policy + head * s->features;
#define ROWS_OF_A_TILE(ROWS) \
    head_backward(ROWS, s, features, head_weight(s, policy, value, head), back, head == 0, \
                  by_features + first * s->features, by_weight)
            FOR_ROWS(count, ROWS_OF_A_TILE)
#undef ROWS_OF_A_TILE
        }
    }
}
