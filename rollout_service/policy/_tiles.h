/* Products of a few rows with a matrix that stays in the second-level cache, for x86 processors with AVX-512.

   Matrices are laid out beforehand as panels of 32 columns, row by row: a tile of 8 rows x 32 columns of the result is
   kept in 16 registers, each row of a panel is read once, and every number of it is used 8 times. A row's results
   depend on no other row, and each sum is formed in one order. All numbers are float32. */

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum {
    LANES = 16, /* floats of a vector */
    WIDTH = 32, /* columns of a panel */
    TILE = 8    /* rows of a tile, at most */
};
#define AVX512 __attribute__((target("avx512f")))
#define INLINE AVX512 static inline __attribute__((always_inline))
#define EACH(row, rows) _Pragma("GCC unroll 8") for (int row = 0; row < (rows); row++)
/* Calls TEMPLATE(rows) with a constant, so that its tile is kept in registers. */
#define FOR_ROWS(rows, TEMPLATE) \
    switch (rows) { \
    case 1: TEMPLATE(1); break; \
    case 2: TEMPLATE(2); break; \
    case 3: TEMPLATE(3); break; \
    case 4: TEMPLATE(4); break; \
    case 5: TEMPLATE(5); break; \
    case 6: TEMPLATE(6); break; \
    case 7: TEMPLATE(7); break; \
    default: TEMPLATE(8); break; \
    }

typedef __m512 Tile[TILE][2];

static Py_ssize_t panels_of(Py_ssize_t columns) { return (columns + WIDTH - 1) / WIDTH; }
static int tile_rows(Py_ssize_t rows) { return rows < TILE ? (int)rows : TILE; }
static uint32_t columns_left(Py_ssize_t columns) { return columns < WIDTH ? (UINT32_C(1) << columns) - 1 : UINT32_MAX; }

INLINE void load(const int rows, Tile tile, const float *from)
{
    EACH(r, rows) {
        tile[r][0] = _mm512_loadu_ps(from + r * WIDTH);
        tile[r][1] = _mm512_loadu_ps(from + r * WIDTH + LANES);
    }
}

INLINE void store(const int rows, Tile tile, float *to)
{
    EACH(r, rows) {
        _mm512_storeu_ps(to + r * WIDTH, tile[r][0]);
        _mm512_storeu_ps(to + r * WIDTH + LANES, tile[r][1]);
    }
}

/* tile[r] += a[r * row_stride + k * stride] * panel[k], over k */
INLINE void multiply(const int rows, Tile tile, const float *a, Py_ssize_t row_stride, Py_ssize_t stride,
                     Py_ssize_t count, const float *panel)
{
    for (Py_ssize_t k = 0; k < count; k++, a += stride, panel += WIDTH) {
        __m512 low = _mm512_loadu_ps(panel), high = _mm512_loadu_ps(panel + LANES);
        EACH(r, rows) {
            __m512 factor = _mm512_set1_ps(a[r * row_stride]);
            tile[r][0] = _mm512_fmadd_ps(factor, low, tile[r][0]);
            tile[r][1] = _mm512_fmadd_ps(factor, high, tile[r][1]);
        }
    }
}

/* 2^y: a polynomial on [-1/2, 1/2], relative error 3e-8, times a power of two; 0 and infinity at the ends. */
INLINE __m512 power_of_two(__m512 y)
{
    __m512 whole = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 rest = _mm512_sub_ps(y, whole), p = _mm512_set1_ps(1.5403530393381606e-4f);
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.3333558146428443e-3f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(9.6181291076284772e-3f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(5.5504108664821580e-2f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(2.4022650695910072e-1f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(6.9314718055994531e-1f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

/* height / (1 + e^(-steepness x)) */
INLINE __m512 logistic(__m512 x, float height, float steepness)
{
    __m512 e = power_of_two(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f * steepness)));
    return _mm512_div_ps(_mm512_set1_ps(height), _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

INLINE __m512 sigmoid(__m512 x) { return logistic(x, 1.0f, 1.0f); }
INLINE __m512 hyperbolic_tangent(__m512 x) { return _mm512_sub_ps(logistic(x, 2.0f, 2.0f), _mm512_set1_ps(1.0f)); }

/* Slopes of a tile's inputs: to [rows, columns] = slopes [panels][slope_rows][32] times weights, laid out for the way
   back. flags: rows that nothing goes back to are not 0; NULL for none. */
INLINE void input_slopes(const int rows, Py_ssize_t panels, const float *slopes, Py_ssize_t slope_rows,
                         const float *weights, const float *flags, float *to, Py_ssize_t columns)
{
    for (Py_ssize_t column = 0; column < columns; column += WIDTH) {
        Tile tile;
        EACH(r, rows) tile[r][0] = tile[r][1] = _mm512_setzero_ps();
        for (Py_ssize_t panel = 0; panel < panels; panel++, weights += WIDTH * WIDTH)
            multiply(rows, tile, slopes + panel * slope_rows * WIDTH, WIDTH, 1, WIDTH, weights);
        uint32_t within = columns_left(columns - column);
        EACH(r, rows) {
            if (flags != NULL && flags[r] != 0.0f)
                tile[r][0] = tile[r][1] = _mm512_setzero_ps();
            _mm512_mask_storeu_ps(to + r * columns + column, (__mmask16)within, tile[r][0]);
            _mm512_mask_storeu_ps(to + r * columns + column + LANES, (__mmask16)(within >> LANES), tile[r][1]);
        }
    }
}

/* by_weights [columns][32] += a' times slopes, over `count` rows: a [count, columns], slopes [count][32]. */
AVX512 static void weight_slopes(const float *a, Py_ssize_t columns, Py_ssize_t count, const float *slopes,
                                 float *by_weights)
{
    for (Py_ssize_t column = 0; column < columns; column += TILE) {
        Tile tile;
        float *to = by_weights + column * WIDTH;
#define TURN(ROWS) \
    load(ROWS, tile, to); \
    multiply(ROWS, tile, a + column, 1, columns, count, slopes); \
    store(ROWS, tile, to)
        FOR_ROWS(tile_rows(columns - column), TURN)
#undef TURN
    }
}

AVX512 static void bias_slopes(Py_ssize_t count, const float *slopes, float *by_bias)
{
    __m512 low = _mm512_loadu_ps(by_bias), high = _mm512_loadu_ps(by_bias + LANES);
    for (Py_ssize_t k = 0; k < count; k++, slopes += WIDTH) {
        low = _mm512_add_ps(low, _mm512_loadu_ps(slopes));
        high = _mm512_add_ps(high, _mm512_loadu_ps(slopes + LANES));
    }
    _mm512_storeu_ps(by_bias, low);
    _mm512_storeu_ps(by_bias + LANES, high);
}

/* How rows of weights [rows, K] become columns of panels: as they come, or, for the gates of an LSTM, 16 units' i and f
   in one panel and their g and o in the next. */
typedef struct { Py_ssize_t rows, hidden; } Order; /* hidden: 0 for rows as they come */

/* The row of weights that a column stands for; -1 for none. */
static Py_ssize_t weight_row(Order order, Py_ssize_t panel, Py_ssize_t column)
{
    if (order.hidden > 0)
        return (2 * (panel % 2) + column / LANES) * order.hidden + panel / 2 * LANES + column % LANES;
    Py_ssize_t row = panel * WIDTH + column;
    return row < order.rows ? row : -1;
}

/* Weights [rows, K] for the way forward: per panel [K][32], panels panel_size apart; zeros where there is no row. */
static void lay_out_forward(Order order, const float *w, Py_ssize_t count, float *panels, Py_ssize_t panel_size)
{
    for (Py_ssize_t panel = 0; panel < panels_of(order.rows); panel++, panels += panel_size)
        for (Py_ssize_t column = 0; column < WIDTH; column++) {
            Py_ssize_t row = weight_row(order, panel, column);
            for (Py_ssize_t k = 0; k < count; k++)
                panels[k * WIDTH + column] = row < 0 ? 0.0f : w[row * count + k];
        }
}

/* The reverse, for slopes. */
static void take_slopes(Order order, const float *panels, Py_ssize_t panel_size, Py_ssize_t count, float *by_w)
{
    for (Py_ssize_t panel = 0; panel < panels_of(order.rows); panel++, panels += panel_size)
        for (Py_ssize_t column = 0; column < WIDTH; column++) {
            Py_ssize_t row = weight_row(order, panel, column);
            for (Py_ssize_t k = 0; row >= 0 && k < count; k++)
                by_w[row * count + k] = panels[k * WIDTH + column];
        }
}

/* Weights [rows, K] for the way back: as panels [panels_of(K)][rows][32], filled up with zeros both ways. */
static void lay_out_backward(Order order, const float *w, Py_ssize_t count, float *panels)
{
    for (Py_ssize_t k = 0; k < count; k += WIDTH) {
        Py_ssize_t width = count - k < WIDTH ? count - k : WIDTH;
        for (Py_ssize_t gate = 0; gate < panels_of(order.rows) * WIDTH; gate++, panels += WIDTH) {
            Py_ssize_t row = weight_row(order, gate / WIDTH, gate % WIDTH);
            memset(panels, 0, WIDTH * sizeof *panels);
            if (row >= 0)
                memcpy(panels, w + row * count + k, width * sizeof *panels);
        }
    }
}
